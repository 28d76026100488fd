"""P/D in one process: vLLM's ExampleConnector, which keeps a prompt's KV in files, made to leave one token to compute.

The original hands over what leaves 2 to 17 tokens. P saves, D loads; neither does anything until it is told to.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector, align_to_block_size


class OneTokenLeft(ExampleConnector):
    """For prompts of 16 m + 1 tokens. A file that is missing is an error."""

    saving = False
    loading = False

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """All whole blocks, when loading."""
        whole = align_to_block_size(len(request.prompt_token_ids), self._block_size)
        return (whole - num_computed_tokens if self.loading else 0), False

    def _found_match_for_prompt(self, *_: Any) -> bool:
        """What is there already is not saved."""
        return not self.saving
