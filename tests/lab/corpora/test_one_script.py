"""JavaScript modules are joined into one script without losing or repeating code."""

import pytest

from probemon.errors import ConfigError
from probemon.lab.corpora.one_script import one_script


def written(folder, **modules):
    for name, text in modules.items():
        (folder / f"{name}.js").write_text(text)
    return folder


def test_each_module_appears_once_before_its_importers(tmp_path):
    folder = written(
        tmp_path,
        page='import { a, $ } from "./a.js";\nimport { b } from "./b.js";\nrun(a, b, $);\n',
        a='import { b } from "./b.js";\nexport const a = b + 1;\nexport function $() {}\n',
        b="export const b = 1; // export of b\n",
    )
    assert one_script(folder / "page.js", folder).split("\n") == [
        '"use strict";', "const b = 1; // export of b", "",
        "const a = b + 1;", "function $() {}", "",
        "run(a, b, $);", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        'import b from "./b.js";', 'import * as b from "./b.js";', 'import { b as c } from "./b.js"; c();',
        'import "./b.js";', "export default b;", "export { b };", '  import { b } from "./b.js";',
    ],
)  # fmt: skip
def test_unsupported_module_syntax_is_refused(tmp_path, line):
    folder = written(tmp_path, page=f"{line}\n", b="export const b = 1;\n")
    with pytest.raises(ConfigError, match=r"page\.js: .* cannot go into one script"):
        one_script(folder / "page.js", folder)
