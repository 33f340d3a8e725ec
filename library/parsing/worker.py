"""The process that reads one uploaded file: ``python -m library.parsing.worker``.

The file is its standard input; its argument is what `parse_file` wrote: the name's ending and the
limits. To standard output it writes lines of JSON: ``{"done": pages, "pages": pages}`` now and
then, and last ``{"code": ..., "message": ...}`` or a `Result`, after which follow the text in
UTF-8 and the packed layout. Its reader trusts none of it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from library.parsing.confinement import confine
from library.parsing.layout import ParsedText
from library.parsing.parsing_limits import ParsingLimits, Progress
from library.parsing.reading import read_file
from library.parsing.unreadable_file import UnreadableFile, refuse_costly

_MESSAGES = 100  # of progress, at most: one for each page would cost more than a page of pictures


def main(
    read: Callable[[BinaryIO, str, ParsingLimits, Progress], ParsedText] = read_file,
) -> None:
    """Read the file, confined."""
    order = json.loads(sys.argv[1])
    limits = ParsingLimits(**order["limits"])
    with os.fdopen(os.dup(1), "wb") as output:
        os.dup2(2, 1)  # no library writes between the messages

        def send(**message: Any) -> None:
            output.write(json.dumps(message).encode() + b"\n")
            output.flush()

        def report(done: int, pages: int) -> None:
            if done % -(-pages // _MESSAGES) == 0:
                send(done=done, pages=pages)

        try:
            confine(limits)
            try:
                parsed = read(sys.stdin.buffer, order["suffix"], limits, report)
                text, layout = parsed.text.encode(), parsed.layout.pack()
            except MemoryError:
                refuse_costly(limits.memory)
        except UnreadableFile as error:
            send(code=error.code, message=str(error))
        else:
            send(media_type=parsed.media_type, text_bytes=len(text), layout_bytes=len(layout))
            output.write(text + layout)


if __name__ == "__main__":
    main()
