from hypothesis import given
from hypothesis import strategies as st

from library.parsing import UnreadableFile
from tests.library.parsing.reading_files import read

PAGE = """<!DOCTYPE html><html><head><title>Lease &amp; terms</title><style>p {}</style></head>
<body><h2>The <b>rent</b></h2><p>is due\n  monthly.<br>In advance.</p>text<ul><li>one<li><p>two</p>
<ul><li>three</ul></ul><table><tr><th>who<th>what<tr><td><p>a</p><p>b</p><td></table>
<pre>  kept\n    as is</pre><div hidden>no</div>seen<script>bad("</p>")</script>
<p style="color: red; display: none">no</p>end<!-- no --><svg><text>no</text></svg></body>"""


def page(html: str) -> str:
    return read(html.encode(), "page.html").text


def test_blocks_stand_on_lines_and_what_is_not_seen_is_left_out():
    assert page(PAGE) == (
        "Lease & terms\n\n## The rent\n\nis due monthly.\nIn advance.\n\ntext\n\n"
        "- one\n- two\n- three\n\nwho | what\na b | \n\n  kept\n    as is\n\nseen\n\nend"
    )


def test_the_declared_encoding_is_used_where_it_is_not_utf_8():
    html = '<meta charset="windows-1251"><p>Да'
    assert read(html.encode("cp1251"), "a.html").text == "Да"
    assert read(html.encode(), "a.html").text == "Да"
    assert read(html.replace("windows-1251", "none").encode(), "a.html").text == "Да"


def test_hostile_pages_are_read():
    assert page("<div>" * 50_000 + "deep") == "deep"
    bomb = '<!DOCTYPE html [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><p>&b;'
    assert "aaaa" not in page(bomb).replace('"aaaa"', "")
    assert page("<p>&#55357;&#0;x") == "\ufffd\ufffdx"
    assert page('<img src="http://127.0.0.1:9/x"><p>words') == "words"


pieces = st.sampled_from(
    [
        f"<{end}{tag}>"
        for tag in ("td", "tr", "table", "li", "pre", "script", "p")
        for end in ("", "/")
    ]
    + ["<p hidden>", "<br>", "word", " ", "\n"]
)


@given(st.lists(pieces, max_size=40).map("".join))
def test_any_nesting_is_read(html):
    try:
        page("word" + html)
    except UnreadableFile as error:
        assert error.code == "empty_file"  # noqa: PT017
