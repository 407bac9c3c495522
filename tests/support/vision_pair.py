"""The hybrid pair under the class of its public checkpoint: a text model with a vision tower."""

from __future__ import annotations

import base64
import io
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from dflash_sglang import zoo

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH = 16  # pixels a side
MERGE = 2  # patches a side that become one token
# The characters that stand for bytes F5 to F8 in a byte-level vocabulary. No UTF-8 text has them,
# so their rows of the embedding are free for tokens that the vocabulary of the pair lacks.
FREE = {START: "õ", END: "ö", IMAGE: "÷", VIDEO: "ø"}
TOWER: dict[str, Any] = {
    "model_type": "qwen3_5_moe",
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [],
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "merge_size": MERGE,
    "temporal_patch_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "size": {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": (8 * PATCH * MERGE) ** 2},
}
CHAT_TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}\
{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def vision_pair(folder: Path) -> zoo.Pair:
    """The embedded hybrid pair, its verifier behind a vision tower of random weights."""
    text = zoo.path("hybrid")
    verifier = folder / "verifier"
    verifier.mkdir(parents=True)
    ids = _tokenizer(text.verifier, verifier)
    config = json.loads((text.verifier / "config.json").read_text())
    tower = TOWER | {"out_hidden_size": config["hidden_size"]}
    wrapped = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {name: value for name, value in config.items() if name != "architectures"},
        "vision_config": tower,
        "image_token_id": ids[IMAGE],
        "video_token_id": ids[VIDEO],
        "vision_start_token_id": ids[START],
        "vision_end_token_id": ids[END],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "dtype": config["dtype"],
    }
    (verifier / "config.json").write_text(json.dumps(wrapped))
    (verifier / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    video = PREPROCESSOR | {"video_processor_type": "Qwen3VLVideoProcessor"}
    (verifier / "video_preprocessor_config.json").write_text(json.dumps(video))
    (verifier / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    shutil.copy(text.verifier / "generation_config.json", verifier)
    weights = {
        name.replace("model.", "model.language_model.", 1): weight
        for name, weight in load_file(text.verifier / "model.safetensors").items()
    }
    save_file(weights | _tower(tower), verifier / "model.safetensors", metadata={"format": "pt"})
    return zoo.Pair(verifier, text.drafter)


def picture(seed: int, columns: int, rows: int) -> Image.Image:
    """A mosaic of random colours that becomes `columns * rows` tokens."""
    chance = random.Random(seed)
    mosaic = Image.frombytes("RGB", (2 * columns, 2 * rows), chance.randbytes(12 * columns * rows))
    side = PATCH * MERGE
    return mosaic.resize((side * columns, side * rows), Image.Resampling.NEAREST)


def answers_of_transformers(
    verifier: Path, questions: Sequence[tuple[str, Sequence[Image.Image]]], tokens: int
) -> list[tuple[int, ...]]:
    """Answers by another implementation of tower, positions and text model, past their ends.

    Args:
        verifier: of `vision_pair`.
        questions: prompts, each with its images.
        tokens: of each answer.
    """
    from transformers import AutoProcessor, Qwen3_5MoeForConditionalGeneration

    processor = AutoProcessor.from_pretrained(verifier)
    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(verifier, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt, images in questions:
        inputs = processor(text=[prompt], images=list(images), return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        answers.append(tuple(output[0, inputs["input_ids"].shape[1] :].tolist()))
    return answers


def data_url(image: Image.Image) -> str:
    """The image as requests carry it."""
    file = io.BytesIO()
    image.save(file, "PNG")  # loses nothing
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _tokenizer(text: Path, folder: Path) -> dict[str, int]:
    """Writes the tokenizer with the tokens of images; returns their ids."""
    tokenizer = json.loads((text / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ids = {name: vocabulary.pop(character) for name, character in FREE.items()}
    vocabulary |= ids
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [like | {"id": at, "content": name} for name, at in ids.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((text / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] += list(ids)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ids


def _tower(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from transformers import Qwen3_5MoeVisionConfig, Qwen3_5MoeVisionModel

    torch.manual_seed(0)
    tower = Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**config))
    for weight in tower.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return {
        f"model.visual.{name}": weight.to(torch.bfloat16)
        for name, weight in tower.state_dict().items()
    }
