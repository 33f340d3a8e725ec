"""Names of full pages of prompts, by which equal ones are found again."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from rapid.messages import Int32Array

_NAME_BYTES = 16  # a BLAKE2b digest of 128 bits


def page_names(
    prompt_ids: Int32Array, page_tokens: int, owner: str, *, is_apart: bool = False
) -> list[bytes]:
    """Return the names of the full pages of a prompt without its last token.

    Args:
        prompt_ids: The prompt, [tokens].
        page_tokens: Tokens of a page.
        owner: Who may share them.
        is_apart: Whether passages of the prompt are read apart, so that its KV is another. No owner
            has such a name otherwise.
    """
    # The last token's row gives the first logits, so it is computed for every request.
    num_pages = (len(prompt_ids) - 1) // page_tokens
    content = np.ascontiguousarray(prompt_ids, dtype=np.int32).tobytes()
    width = np.dtype(np.int32).itemsize * page_tokens
    person = b"apart" if is_apart else b""
    name = blake2b(owner.encode(), digest_size=_NAME_BYTES, person=person).digest()
    names = []
    for start in range(0, num_pages * width, width):
        name = blake2b(content[start : start + width], digest_size=_NAME_BYTES, key=name).digest()
        names.append(name)
    return names
