"""Run the notebooks of examples/ from a fresh start and write their outputs into them. Needs the extra `dev`.

python scripts/run_examples.py            # all of them
python scripts/run_examples.py watch
"""

import argparse
import copy
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class Client(NotebookClient):
    """Runs a notebook and keeps in `updates` what was shown in the place of something else, in the order of coming."""

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "update_display_data":
            self.updates.append(msg["content"]["data"])
        return super().process_message(msg, cell, cell_index)


def executed(notebook: Any, folder: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return a copy of the notebook as it is after running in `folder`, without what went to standard error, and the
    updates of its displays. Raises what a cell raises.
    """
    fresh = copy.deepcopy(notebook)
    # Else what a cell prints is in as many pieces as happened to be sent.
    options = {"timeout": 300, "record_timing": False, "coalesce_streams": True}
    client = Client(fresh, **options, resources={"metadata": {"path": str(folder)}})
    client.updates = []
    client.execute()
    for cell in fresh.cells:
        if cell.cell_type == "code":  # warnings there name paths of this machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    fresh.metadata = nbformat.from_dict(_METADATA)
    return fresh, client.updates


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the kernels that are started, as where the notebooks are tested
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which of them; all by default")
    names = parser.parse_args().names
    for path in sorted(EXAMPLES.glob("*.ipynb")):
        if not names or path.stem in names:
            notebook, _ = executed(nbformat.read(path, as_version=4), EXAMPLES)
            nbformat.write(notebook, path)
            print(path)


if __name__ == "__main__":
    main()
