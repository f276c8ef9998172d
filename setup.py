"""Put what stands once in probes/, the demo's packs and the library of concepts, into wheels and source archives.

Everything else about the package is said in pyproject.toml. An editable installation reads both where they are.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = tuple(Path("probes", name) for name in ("wordnet-smollm2-135m", "concepts-smollm2-135m", "library"))


class BuildWithProbes(build_py):
    """Builds the package with the files of these folders as `probemon/probes/NAME/...`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, built in self._files().items():
                self.mkpath(str(Path(built).parent))
                self.copy_file(source, built)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Name the files that a build makes."""
        return [*super().get_outputs(include_bytecode), *self._files().values()]

    def get_source_files(self) -> list[str]:
        """Name the files that a source archive must hold."""
        return [*super().get_source_files(), *self._files()]

    def _files(self) -> dict[str, str]:
        """Return where each file is built, by where it is."""
        files = sorted(file for folder in FOLDERS for file in folder.rglob("*") if file.is_file())
        return {str(file): str(Path(self.build_lib, "probemon", file)) for file in files}


setup(cmdclass={"build_py": BuildWithProbes})
