"""The scores of sparse attention's indexer in plain PyTorch, for machines whose PyTorch DeepGEMM
was not built for.

vLLM prefers a module of this name to the DeepGEMM in its wheel, so that the folder on `PYTHONPATH`
is enough. The rest of such a model, its other kernels and its CUDA graphs are vLLM's own. Scores
are those of https://arxiv.org/abs/2512.02556: over all heads the sum of w * relu(q . k).
"""

import torch

try:
    from vllm.third_party.deep_gemm import (
        fp8_fp4_mqa_logits,
        fp8_fp4_paged_mqa_logits,
        get_paged_mqa_logits_metadata,
    )
except (ImportError, OSError, AssertionError):  # not there, or its binary is of another PyTorch
    FP8 = torch.float8_e4m3fn

    def _scores(
        q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[b, n, s] float32 of q [b, n, heads, d], k [b, s, d], scale [b, s] and weights [b, n,
        heads]."""
        of_heads = (
            torch.einsum("bnhd,bsd->bnhs", q.to(torch.bfloat16), k.to(torch.bfloat16))
            .float()
            .relu()
        )
        return torch.einsum("bnhs,bnh->bns", of_heads, weights) * scale[:, None]

    def fp8_fp4_mqa_logits(
        q: tuple[torch.Tensor, None],
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        clean_logits: bool,
    ) -> torch.Tensor:
        """[m, n] float32 of q [m, heads, d] and k [n, d], each row of which sees the keys from its
        start to its end."""
        (k, scale), at = kv, torch.arange(len(kv[0]), device=starts.device)
        scores = _scores(q[0][None], k[None], scale[None], weights[None])[0]
        return scores.masked_fill((at < starts[:, None]) | (at >= ends[:, None]), -torch.inf)

    def get_paged_mqa_logits_metadata(
        context_lens: torch.Tensor, block_size: int, num_slots: int
    ) -> torch.Tensor:
        """Which multiprocessor computes what; nobody reads it here."""
        return context_lens.new_zeros(num_slots + 1, 2)

    def fp8_fp4_paged_mqa_logits(
        q: tuple[torch.Tensor, None],
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        schedule_metadata: torch.Tensor,
        max_model_len: int,
        clean_logits: bool,
    ) -> torch.Tensor:
        """[b * n, max_model_len] float32 of q [b, n, heads, d], whose context lengths are [b, n].

        A block of the cache [blocks, block size, 1, d + 4], in bytes, has first all of its keys and
        then their scales.
        """
        b, n, heads, d = q[0].shape
        blocks, size, _, width = kv_cache.shape
        flat = kv_cache.as_strided((blocks, size * width), (kv_cache.stride(0), 1))
        own = flat[block_tables[:b].clamp(0, blocks - 1).long()]
        k = own[..., : size * d].contiguous().view(FP8).reshape(b, -1, d)
        scale = own[..., size * d :].contiguous().view(torch.float32).reshape(b, -1)
        scores = _scores(q[0], k, scale, weights.view(b, n, heads))[..., :max_model_len]
        hidden = (
            torch.arange(scores.shape[2], device=scores.device)
            >= context_lens.view(b, -1)[..., None]
        )
        logits = scores.new_full((b * n, max_model_len), -torch.inf)
        logits[:, : scores.shape[2]] = scores.masked_fill(hidden, -torch.inf).view(b * n, -1)
        return logits


__all__ = ["fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_paged_mqa_logits_metadata"]
