"""HTML for notebooks shows any text as text, in colours that are readable on light and dark pages."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probemon.util.harmless_text import clip, harmless
from probemon.util.static_html import ALPHAS, HUES, MAX_BYTES, Colours, fragment
from probemon.util.templates import macros, template_environment
from static_page import HOSTILE, read

CHARACTERS = st.characters(codec=None) | st.sampled_from("<>&\"'\x1b\u202e\n/=-!")
SHARED = macros("util/static.html.j2")
LINE = r"""{% macro line(text, title) %}
<p>a<b title="{{ title|harmless("\n") }}">{{ text }}</b>{{ text }}c</p>
{% endmacro %}"""
TEXTS = st.text(CHARACTERS, max_size=60) | st.sampled_from([text for text in HOSTILE if len(text) < 100])


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS)
def test_text_and_attributes_are_escaped_and_otherwise_unchanged(text, title):
    page = read(fragment("t", [template_environment().from_string(LINE).module.line(text, title)]))
    [(_, shown_title, bold)] = page.of("b")
    assert bold == harmless(text, keep="\n\t") and shown_title == harmless(title, keep="\n")
    assert page.of("p")[-1][2] == f"a{bold}{bold}c"


def test_table_has_its_cells_in_their_columns():
    page = read(fragment("t", [SHARED.table(["name", "n"], [["<b>", "1"], [["a", "b"], "2"]], [1])]))
    assert [(kinds, text) for kinds, _, text in page.of("td")] == [
        ([], "<b>"), (["number"], "1"), ([], "a › b"), (["number"], "2"),
    ]  # fmt: skip


def test_long_names_and_paths_are_shortened_visibly():
    assert clip("x" * 61, 60) == f"{'x' * 60}… (61 characters)" and clip("x" * 60, 60) == "x" * 60
    page = read(fragment("t", [SHARED.dim(SHARED.path([f"n{i}" for i in range(1000)]))]))
    assert page.of("p")[-1][2] == "n0 › n1 › n2 › n3 › … › n996 › n997 › n998 › n999"


def test_page_size_is_bounded_and_omitted_parts_are_named():
    parts = [f"<p>{'x' * size}</p>" for size in (100_000, 250_000, 100_000, 300_000, 10)]
    html = fragment("title" * 1000, parts)
    page = read(html)
    assert len(html.encode()) <= MAX_BYTES
    lengths = [len(text) for _, _, text in page.of("p") if text.startswith("x")]
    assert lengths == [100_000, 100_000, 10]
    left_out = [text for _, _, text in page.of("p") if "left out" in text]
    assert [text[:23] for text in left_out] == ["A part of 250,007 bytes", "A part of 300,007 bytes"]
    assert len(fragment("t", (f"<p>{'é' * 200_000}</p>" for _ in range(5000))).encode()) <= MAX_BYTES


def test_roots_have_distinct_colours_until_none_is_left():
    colours = Colours()
    kinds = [colours.of(f"root {i}", 0.1) for i in range(12)]
    assert kinds[:7] == [f"h{i}s0" for i in range(7)] and set(kinds[7:]) == {"h7s0"}
    assert [colours.of("root 3", strength) for strength in (0.49, 0.5, 1.99, 2.0)] == ["h3s0", "h3s1", "h3s1", "h3s2"]


def luminance(rgb):
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("hue", HUES)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize(
    ("ink", "paper"),
    [((0,) * 3, (255,) * 3), ((33,) * 3, (255,) * 3), ((225,) * 3, (17,) * 3), ((204,) * 3, (30,) * 3)],
    ids=["black on white", "grey on white", "light on black", "grey on dark grey"],
)
def test_text_on_every_colour_has_wcag_contrast(hue, alpha, ink, paper):
    mixed = [alpha * c + (1 - alpha) * p for c, p in zip(hue, paper, strict=True)]
    assert contrast(ink, mixed) >= 4.5


@pytest.mark.parametrize("hue", HUES)
@pytest.mark.parametrize("paper", [255, 30, 17], ids=["white", "dark grey", "near black"])
def test_underline_of_a_token_has_wcag_contrast(hue, paper):
    assert contrast(hue, (paper,) * 3) >= 3
    r, g, b = hue
    [(_, _, style)] = read(fragment("t", [])).of("style")
    assert f"inset 0 -2px rgb({r} {g} {b});" in style
