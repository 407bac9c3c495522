"""The bugs that `bench.kernels.mutants` plants; a kernel's interpreted tests must catch its own."""

from typing import NamedTuple

SHARED = "triton_common.py"


class Mutant(NamedTuple):
    """One planted bug."""

    op: str  # whose cases must catch it
    bug: str
    right: str  # the first occurrence of this text is replaced
    wrong: str
    file: str = "kernel.py"  # of the op, or `SHARED`


MUTANTS = (
    Mutant(
        "prepare_block", "the anchor in every column", "column == 0, anchor", "column >= 0, anchor"
    ),
    Mutant(
        "prepare_block",
        "positions start after the prefix",
        "tl.int64) + column",
        "tl.int64) + column + 1",
    ),
    Mutant(
        "prepare_block",
        "32-bit table address",
        "tl.load(row_ptr + request).to(tl.int64) * table_stride",
        "(tl.load(row_ptr + request).to(tl.int32) * table_stride).to(tl.int32)",
    ),
    Mutant(
        "prepare_block",
        "every request has the prefix of the first",
        "tl.load(prefix_ptr + request)",
        "tl.load(prefix_ptr)",
    ),
    Mutant(
        "accept_match",
        "draft compared with its own column",
        "draft_stride + column + 1",
        "draft_stride + column",
    ),
    Mutant(
        "accept_match",
        "match after a mismatch counts",
        "tl.min(tl.where(accepted, width, column), 0)",
        "tl.sum(accepted.to(tl.int32), 0)",
        SHARED,
    ),
    Mutant(
        "accept_match",
        "limit off by one",
        "accepted & (column < tl.load(limit_ptr",
        "accepted & (column <= tl.load(limit_ptr",
    ),
    Mutant(
        "accept_match",
        "exceptions lift the limit",
        "(column < tl.load(limit_ptr + request))",
        "((column < tl.load(limit_ptr + request)) | (draft != chosen))",
    ),
    Mutant(
        "accept_match",
        "output is the verifier's token",
        "tl.where(column < accept_len, draft, chosen)",
        "chosen",
        SHARED,
    ),
    Mutant(
        "accept_match",
        "length without the bonus",
        "tl.load(prefix_ptr + request) + accept_len + 1",
        "tl.load(prefix_ptr + request) + accept_len",
        SHARED,
    ),
    Mutant("draft_tail", "ties to the largest id", "(index ^ 0x7FFFFFFF)", "(index)"),
    Mutant(
        "draft_tail",
        "negative values ordered by their bits",
        "return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)",
        "return bits",
        SHARED,
    ),
    Mutant("draft_tail", "-0 below 0", "tl.where(value == 0.0, 0.0, value)", "value", SHARED),
    Mutant(
        "draft_tail",
        "padding may be chosen",
        "mask=index < num_ids",
        "mask=index < num_ids + 64",
        SHARED,
    ),
    Mutant(
        "draft_tail", "NaN wins", 'return tl.where(x == x, x, float("-inf"))', "return x", SHARED
    ),
    Mutant(
        "draft_tail",
        "32-bit row address",
        "row.to(tl.int64) * row_stride",
        "row * row_stride",
        SHARED,
    ),
    Mutant("draft_tail", "sums of tiles not rescaled", "sums * tl.exp(peaks - shift)", "sums"),
    Mutant(
        "draft_tail", "a chosen id stays", "key = tl.where(key == best, NO_KEY, key)", "key = key"
    ),
    Mutant(
        "verify_bound", "logits without their normaliser", "tl.exp(value - lse)", "tl.exp(value)"
    ),
    Mutant(
        "verify_bound",
        "drafts do not depend on those before",
        "tl.cumprod(accepted, 0)",
        "accepted",
    ),
    Mutant(
        "verify_bound", "prices of one draft less", "prices_ptr + 1 + lane", "prices_ptr + lane"
    ),
    Mutant(
        "verify_bound",
        "the first of equals",
        "count = tl.max(tl.where(drafted & (worth == best), lane + 1, 0), 0)",
        "count = LANES - tl.max(tl.where(drafted & (worth == best), LANES - lane - 1, 0), 0)",
    ),
    Mutant("verify_bound", "verifying nothing is never best", "-tl.load(prices_ptr))", "-1e9)"),
    Mutant("verify_bound", "values lie side by side", "lane * value_stride", "lane"),
    Mutant(
        "verify_bound",
        "drafts instead of tokens",
        "tl.store(out_ptr, count + 1)",
        "tl.store(out_ptr, count)",
    ),
    Mutant(
        "context_kv",
        "norm without its weight",
        "first *= scale * tl.load(weights + dim, mask=dim < HALF, other=0.0)",
        "first *= scale * tl.full((), 1.0, tl.float32)",
    ),
    Mutant(
        "context_kv",
        "mean over the rotary dimensions only",
        "square / HEAD_DIM",
        "square / (2 * HALF)",
    ),
    Mutant(
        "context_kv",
        "rotated the other way",
        "first * cos - second * sin",
        "first * cos + second * sin",
    ),
    Mutant("context_kv", "rest not normalised", "rest * scale * weight", "rest * weight"),
    Mutant(
        "context_kv",
        "scales of the first layer",
        "value_scale = scales_ptr + 2 * layer + 1",
        "value_scale = scales_ptr + 1",
    ),
    Mutant(
        "context_kv",
        "valid prefix off by one",
        "token % width < tl.load",
        "token % width <= tl.load",
    ),
    Mutant("context_kv", "negative slots written", "if slot < 0:", "if slot < -1:"),
    Mutant("context_kv", "FP8 does not saturate", "tl.minimum(tl.abs(x), 448.0)", "tl.abs(x)"),
    Mutant(
        "context_kv",
        "FP8 ties away from even",
        "bits + 0x7FFFF + ((bits >> 20) & 1)",
        "bits + 0x80000",
    ),
    Mutant(
        "context_kv",
        "32-bit cache address",
        "tl.load(slots_ptr + token).to(tl.int64)",
        "tl.load(slots_ptr + token).to(tl.int32)",
    ),
    Mutant(
        "accept_sampled",
        "noise of the block's first position",
        "tl.load(prefix_ptr + request) + row % width",
        "tl.load(prefix_ptr + request)",
    ),
    Mutant(
        "accept_sampled",
        "seed's high word dropped",
        "(seed >> 32).to(tl.uint32)",
        "(seed * 0).to(tl.uint32)",
        SHARED,
    ),
    Mutant(
        "accept_sampled",
        "temperature ignored by the deciding score",
        "tl.div_rn(logit, divisor)",
        "logit",
        SHARED,
    ),
    Mutant(
        "accept_sampled", "temperature ignored in the search", "x * (1.0 / divisor)", "x", SHARED
    ),
    Mutant(
        "accept_sampled",
        "float32 decides",
        "near & (index > candidate)",
        "near & (index < 0)",
        SHARED,
    ),
    Mutant(
        "accept_sampled",
        "noise on greedy rows",
        "exact += tl.where(drawn, gumbel64",
        "exact += tl.where(True, gumbel64",
        SHARED,
    ),
    Mutant(
        "accept_sampled",
        "two terms of the series",
        "square * (2.0 / 5 + square * (2.0 / 7))",
        "0.0",
        SHARED,
    ),
    Mutant(
        "accept_sampled",
        "draft compared with its own column",
        "draft_stride + column + 1",
        "draft_stride + column",
        SHARED,
    ),
    Mutant("accept_sampled", "first tile wins", "tl.max(score, 1)[:, None]", "score", SHARED),
    Mutant(
        "block_verify",
        "ratio above 1",
        "ratio = tl.minimum(ratio * tl.sum(tl.where(column == i, steps, 0.0), 0), 1.0)",
        "ratio = ratio * tl.sum(tl.where(column == i, steps, 0.0), 0)",
    ),
    Mutant(
        "block_verify",
        "mass elsewhere forgotten",
        "surplus = ratios * elsewhere + above",
        "surplus = above",
    ),
    Mutant(
        "block_verify",
        "the last draft treated like the others",
        "return tl.where(column == last, ratios, inner)",
        "return inner",
    ),
    Mutant(
        "block_verify", "uniform of the next draft", "uniforms + column - 1", "uniforms + column"
    ),
    Mutant(
        "block_verify",
        "a block ends at its first failure",
        "tl.max(tl.where(reachable & (u < keep), column, 0), 0)",
        "tl.min(tl.where(reachable & (u >= keep), column - 1, last), 0)",
    ),
    Mutant(
        "block_verify",
        "token-wise: accepted after a rejection",
        "tl.min(tl.where(accepted, width, column), 0)",
        "tl.sum(accepted.to(tl.int32), 0)",
    ),
    Mutant(
        "block_verify",
        "limit ignored",
        "last = tl.minimum(tl.load(limit_ptr",
        "tl.minimum(tl.load(limit_ptr",
    ),
    Mutant(
        "block_verify",
        "bonus of the verifier's whole distribution",
        "tl.store(following_ptr + request, tl.where(whole, -1, accept_len))",
        "tl.store(following_ptr + request, tl.where(whole, -1, -1))",
    ),
    Mutant(
        "block_verify",
        "residual without its ratio",
        "tl.store(ratio_ptr + request, tl.where(whole, 1.0, ratio))",
        "tl.store(ratio_ptr + request, tl.where(whole, 1.0, ratio * 0 + 1))",
    ),
    Mutant(
        "block_verify",
        "proposal subtracted in the first tile only",
        "if proposed // TILE == tile:",
        "if (proposed // TILE == tile) & (tile == 0):",
    ),
    Mutant(
        "block_verify",
        "negative weights kept",
        "weight = tl.maximum(weight, 0.0)",
        "weight = tl.maximum(weight, -1.0)",
    ),
    Mutant(
        "block_verify",
        "threshold of the tile not made relative",
        "threshold -= tl.sum(tl.where(tile < chosen, sums, 0.0), 0)",
        "threshold -= 0.0",
    ),
    Mutant(
        "block_verify",
        "no fallback without mass",
        "if tl.sum(sums, 0) <= 0:",
        "if tl.sum(sums, 0) < 0:",
    ),
    Mutant(
        "block_verify",
        "32-bit row address",
        "tl.load(accept_ptr + request).to(tl.int64) * row_stride",
        "tl.load(accept_ptr + request) * row_stride",
    ),
    Mutant(
        "block_verify",
        "32-bit request address",
        "request.to(tl.int64) * verifier_stride",
        "request * verifier_stride",
    ),
    Mutant(
        "accept_filtered",
        "bound of top-k a token too high",
        ".to(tl.int32), 0) >= top_k",
        ".to(tl.int32), 0) >= top_k - 1",
    ),
    Mutant(
        "accept_filtered",
        "bound of the mass counts columns at their sum",
        "part_sums - (PART - 1) * tl.exp(low - peak)",
        "part_sums",
    ),
    Mutant(
        "accept_filtered",
        "sums of parts not rescaled",
        "part_sums * tl.exp(tile_peaks - shift)",
        "part_sums",
    ),
    Mutant(
        "accept_filtered",
        "a tile without tokens above is all that is gathered",
        "(peak >= bound) & (peak >",
        "(peak <= bound) & (peak >",
    ),
    Mutant(
        "accept_filtered",
        "tiles write over each other",
        "tl.atomic_add(count_ptr + row, tl.sum(added, 0))",
        "tl.atomic_add(count_ptr + row, 0)",
    ),
    Mutant(
        "accept_filtered",
        "top-k keeps one more",
        "(number_above < top_k)",
        "(number_above <= top_k)",
    ),
    Mutant(
        "accept_filtered",
        "top-p of an unnormalised mass",
        "mass_above < top_p * total",
        "mass_above < top_p",
    ),
    Mutant(
        "accept_filtered",
        "min-p ignored where a row is read again",
        "kept = kept & (tl.exp(scaled - peak) >= min_p)",
        "kept = kept",
    ),
    Mutant(
        "accept_filtered",
        "a row that does not fit is drawn from what fits",
        "if count <= CAPACITY:",
        "if count <= 2 * TILE:",
    ),
    Mutant(
        "accept_filtered",
        "noise of the place, not of the id",
        "score = scaled.to(tl.float64) + gumbel64(hash_of(row_hash, ids))",
        "score = scaled.to(tl.float64) + gumbel64(hash_of(row_hash, place))",
    ),
    Mutant(
        "accept_filtered",
        "unfiltered requests are filtered",
        "(top_k < num_ids) | (top_p < 1) | (min_p > 0)",
        "(top_k < num_ids) | (top_p < 2) | (min_p > 0)",
    ),
)
