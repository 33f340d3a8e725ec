"""A writer of small PDFs: text at places, in one font whose characters may be renamed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Placed = tuple[float, float, str]  # points from the left and from the bottom, and the text


def write_pdf(
    pages: Sequence[Sequence[Placed]],
    *,
    names: Mapping[str, str] | None = None,
    rotate: int = 0,
    media_box: tuple[float, float, float, float] = (0, 0, 612, 792),
    count: int | None = None,
) -> bytes:
    """Return a PDF; `names` says which characters the font means by those in the text."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b""]
    font = b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding"
    if names:
        mapping = "".join(
            f"<{ord(old):02X}> <{new.encode('utf-16-be').hex()}>\n" for old, new in names.items()
        )
        objects.append(
            stream(
                "/CIDInit /ProcSet findresource begin 12 dict begin begincmap\n"
                "1 begincodespacerange <00> <FF> endcodespacerange\n"
                f"{len(names)} beginbfchar\n{mapping}endbfchar endcmap end end"
            )
        )
        font += b"/ToUnicode 4 0 R"
    objects[2] = font + b">>"
    kids = []
    for page in pages:
        content = "\n".join(f"BT /F1 12 Tf {x} {y} Td ({text}) Tj ET" for x, y, text in page)
        objects.append(stream(content))
        box = " ".join(map(str, media_box))
        objects.append(
            f"<</Type/Page/Parent 2 0 R/MediaBox[{box}]/Rotate {rotate}"
            f"/Resources<</Font<</F1 3 0 R>>>>/Contents {len(objects)} 0 R>>".encode()
        )
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<</Type/Pages/Count {count or len(pages)}/Kids[{' '.join(kids)}]>>".encode()
    return join(objects)


def stream(content: str) -> bytes:
    data = content.encode("cp1252")
    return b"<</Length %d>>stream\n%s\nendstream" % (len(data), data)


def join(objects: Sequence[bytes]) -> bytes:
    out = bytearray(b"%PDF-1.7\n")
    offsets = []
    for number, each in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    out += b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, start)
    return bytes(out)
