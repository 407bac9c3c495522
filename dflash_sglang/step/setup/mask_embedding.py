"""`mask_embedding.pt`: a mask-token embedding trained with the drafter."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dflash_sglang.errors import PairError

_FILE = "mask_embedding.pt"


def load_mask_embedding(
    draft_model_path: str, mask_token_id: int, device: torch.device | str
) -> Tensor | None:
    """Read the embedding, when the draft checkpoint has one.

    It is used for drafting only. Writing it into the verifier's table, as SGLang's worker does,
    would change what the verifier makes of a prompt that contains the mask token.

    Args:
        draft_model_path: folder of the draft checkpoint.
        mask_token_id: id the draft configuration names.
        device: where to put it.

    Returns:
        [hidden], or None without a file.

    Raises:
        PairError: trained for another mask token, or one embedding a position.
    """
    file = Path(draft_model_path) / _FILE
    if not file.is_file():
        return None
    saved = torch.load(file, map_location=device, weights_only=True)
    if saved.get("per_position"):
        raise PairError(
            f"{file} has an embedding per block position, which is not supported. Use a checkpoint "
            "with one mask embedding."
        )
    if int(saved["mask_token_id"]) != mask_token_id:
        raise PairError(
            f"{file} was trained for mask token {saved['mask_token_id']}, but config.json of "
            f"--speculative-draft-model-path names mask_token_id {mask_token_id}. Make them agree."
        )
    embedding: Tensor = saved["embedding"]
    return embedding
