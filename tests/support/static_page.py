"""What a notebook shows, read by a real HTML parser: `read(html)` fails where it is not static, whole and small."""

import unicodedata
from html.parser import HTMLParser

ALLOWED = {"div", "p", "span", "b", "bdi", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "style"}
BIDI = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
MOST_BYTES = 300_000
# What tokens, names and documents may try: markup, ends of attributes, escapes, directions, half a pair, no end.
HOSTILE = (
    "<script>alert(1)</script>", "</span></div></style>", '" onmouseover="alert(1)" x="', "<!--", "{{style}}",
    "<img src=http://x/y onerror=e>", "<svg/onload=alert(1)>", "&lt;b&amp;", "\x1b]0;pwned\x07\x1b[2J",
    "\u202egnp\u2066", "\ud800\x00\x9b31m\x7f", "\u2028\r", "a" * 100_000, "z\u0335" * 5_000,
)  # fmt: skip


class Page(HTMLParser):
    """`elements`: (tag, classes, title, text in it, whether it is in a text block), in the order of their ends."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self._open = [], []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        assert tag in ALLOWED, tag
        assert {name for name, _ in attributes} <= {"class", "title", "dir"}, attributes
        for _, value in attributes:
            assert not harmful(value, "\n"), value
        self._open.append([tag, dict(attributes), ""])

    def handle_startendtag(self, tag, attributes):
        raise AssertionError(f"<{tag}/>")

    def handle_endtag(self, tag):
        opened, attributes, text = self._open.pop()
        assert opened == tag, f"<{opened}> is closed by </{tag}>"
        assert not harmful(text, "\n\t"), text
        kinds = attributes.get("class", "").split()
        in_text = any("text" in outer.get("class", "").split() for _, outer, _ in self._open)
        self.elements.append((tag, kinds, attributes.get("title", ""), text, in_text))
        if self._open and tag != "style":
            self._open[-1][2] += text

    def handle_data(self, data):
        assert self._open, f"text outside of all elements: {data!r}"
        self._open[-1][2] += data

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data!r}")

    handle_decl = handle_pi = unknown_decl = handle_comment

    @property
    def text(self):
        return self.elements[-1][3]

    def of(self, tag, kind=None):
        """The (classes, title, text) of every element of a tag, and of a class."""
        return [element[1:4] for element in self.elements if element[0] == tag and (kind is None or kind in element[1])]

    def tokens(self):
        """The (classes, title, text) of every token shown."""
        return [element[1:4] for element in self.elements if element[0] == "span" and element[4]]


def harmful(text, keep):
    return [c for c in text if c not in keep and (unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or c in BIDI)]


def read(html):
    assert len(html.encode("utf-8")) <= MOST_BYTES
    page = Page(html)
    [(_, _, style)] = page.of("style")
    assert not {"url(", "@import", "expression", "\\"} & {
        word for word in ("url(", "@import", "expression", "\\") if word in style
    }
    assert page.elements[-1][:2] == ("div", ["probemon"])
    return page
