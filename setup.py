"""Put the default pack, of which the repository has one copy in probes/, into wheels and source archives.

Everything else about the package is said in pyproject.toml. An editable installation reads the pack where it is.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PACK = Path("probes/wordnet-smollm2-135m")


class BuildWithPack(build_py):
    """Builds the package with the files of the pack as `probemon/probes/NAME/...`."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, built in self._pack_files().items():
                self.mkpath(str(Path(built).parent))
                self.copy_file(source, built)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Name the files that a build makes."""
        return [*super().get_outputs(include_bytecode), *self._pack_files().values()]

    def get_source_files(self) -> list[str]:
        """Name the files that a source archive must hold."""
        return [*super().get_source_files(), *self._pack_files()]

    def _pack_files(self) -> dict[str, str]:
        """Return where each file of the pack is built, by where it is."""
        files = sorted(PACK.iterdir())
        return {str(file): str(Path(self.build_lib, "probemon", file)) for file in files}


setup(cmdclass={"build_py": BuildWithPack})
