"""The folder of an analysis: parquet tables and a manifest. Needs the extra `corpus`.

    analysis = Analysis.open("scores/")
    analysis.documents(), analysis.scores(document=17)       # pyarrow tables

Format: docs/formats.md. A shard's `.json` is written after its tables, so an interrupted folder has only whole
shards.
"""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.errors import ConfigError, SinkFailed
from probemon.host.chat_forms import PARTS
from probemon.lab.corpora.analysis_files import (
    ROWS_PER_GROUP,
    TABLES,
    arrow,
    read_json,
    read_table,
    replacing,
    schemas,
    write_json,
    write_table,
)
from probemon.util.checks import check_count
from probemon.util.counted import counted
from probemon.util.near_folders import near_folders

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT, FORMAT_VERSION = "probemon-analysis", 2
MANIFEST, SHARDS = "manifest.json", "shards"


def check_target(path: Path) -> None:
    """Raise `ConfigError` if the path has something other than an analysis."""
    # A killed run may leave hidden files. Files first: another process may begin the analysis meanwhile.
    try:
        is_taken = path.exists() and (
            not path.is_dir()
            or any(not entry.name.startswith((f".{MANIFEST}", ".spool", ".lock")) for entry in path.iterdir())
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check its permissions") from error
    if is_taken and (not path.is_dir() or read_json(path / MANIFEST) is None):
        raise ConfigError(f"{path} exists and has no analysis: give a folder that is empty or does not exist")


class Analysis:
    """An analysis of a corpus: `open` reads one; `begin`, `write_shard` and `finish` write one."""

    def __init__(self, directory: Path, manifest: dict[str, Any], elsewhere: Sequence[str] = ()) -> None:
        self.directory, self.manifest = directory, manifest
        self._elsewhere = elsewhere  # of the environment

    def __repr__(self) -> str:
        totals, pack = self.manifest.get("totals"), self.manifest["identity"]["pack"]["name"]
        counts = (
            "not finished"
            if totals is None
            else f"{counted(totals['documents'], 'document')}, {counted(totals['tokens'], 'token')}"
        )
        return f"{type(self).__name__}({str(self.directory)!r}, {counts}, pack {pack!r})"

    def _repr_html_(self) -> str:
        from probemon.lab.corpora.analysis_html import analysis_html

        return analysis_html(self)

    # Reading

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, unfinished: bool = False) -> Analysis:
        """Raises `ConfigError` if there is no finished analysis in the folder."""
        path = Path(directory)
        if path.is_file():
            raise ConfigError(f"{path} is a file: give the folder that `probemon analyze` wrote")
        manifest = read_json(path / MANIFEST)
        if manifest is None and not path.exists():
            near = near_folders(str(path), "documents.parquet")
            remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "`probemon analyze` writes one"
            raise ConfigError(f"no such folder: {str(path)!r}; {remedy}")
        if manifest is None or manifest.get("format") != FORMAT:
            raise ConfigError(f"{path} has no analysis: give the folder that `probemon analyze` wrote")
        if manifest.get("format_version") != FORMAT_VERSION:
            raise ConfigError(
                f"{path}: format_version is {manifest.get('format_version')!r}, this probemon reads {FORMAT_VERSION}:"
                " make it again"
            )
        analysis = cls(path, manifest)
        if not (analysis.complete or unfinished):
            raise ConfigError(
                f"the analysis in {path} is not finished: run the same command again, it continues where it ended"
            )
        return analysis

    @property
    def complete(self) -> bool:
        """Whether it has every document."""
        return bool(self.manifest.get("complete"))

    def documents(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a row for each document: tokens, coverage, reason if bad."""
        return read_table(self.directory / "documents.parquet", columns)

    def summary(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a row for each document and concept over the floor in it."""
        return read_table(self.directory / "summary.parquet", columns)

    def concepts(self) -> pa.Table:
        """Return a row for each concept of the pack."""
        return read_table(self.directory / "concepts.parquet")

    def scores(self, document: int | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the rows above the floor, of one document or all. Raises `ConfigError`."""
        pa = arrow()
        shards = self.manifest["shards"]
        if document is not None:
            document = check_count(
                "document",
                document,
                remedy="give its number, the column `document` of documents(), since ids may repeat",
            )
        unknown = [name for name in columns or () if name not in schemas()["scores"].names]
        if unknown:
            raise ConfigError(f"scores have no column {unknown[0]!r}, they have {', '.join(schemas()['scores'].names)}")
        if document is not None:
            shards = [shard for shard in shards if shard["first"] <= document < shard["first"] + shard["n_documents"]]
            if not shards:
                raise ConfigError(
                    f"document {document}: the analysis has documents 0..{self.manifest['totals']['documents'] - 1}"
                )
        filters = None if document is None else [("document", "=", document)]
        tables = [read_table(self._path(shard["index"], "scores.parquet"), columns, filters) for shard in shards]
        return pa.concat_tables(tables).unify_dictionaries() if tables else schemas()["scores"].empty_table()

    # Writing

    @classmethod
    def begin(
        cls,
        directory: str | os.PathLike[str],
        identity: Mapping[str, Any],
        environment: Mapping[str, Any],
        *,
        resume: bool,
    ) -> Analysis:
        """Begin or continue an analysis of this `identity`. Raises `ConfigError` if it differs."""
        path, identity_json = Path(directory), json.loads(json.dumps(identity))
        check_target(path)
        begun = read_json(path / MANIFEST)
        if begun is None:
            manifest = {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "identity": identity_json,
                "environment": dict(environment),
                "complete": False,
            }
            try:
                path.mkdir(parents=True, exist_ok=True)
                with cls(path, manifest)._lock("begin", fcntl.LOCK_EX):
                    begun = read_json(path / MANIFEST)
                    if begun is None:
                        write_json(path / MANIFEST, manifest)
                        return cls(path, manifest)
            except OSError as error:
                raise ConfigError(f"{path} cannot be made ({error.strerror}): give another folder") from error
        if not resume:
            raise ConfigError(f"{path} has an analysis: pass resume=True to continue it, or give another folder")
        if (begun.get("format"), begun.get("format_version")) != (FORMAT, FORMAT_VERSION):
            raise ConfigError(f"{path / MANIFEST} is not of an analysis of this format: give another folder")
        if begun["identity"] != identity_json:
            differs = "; ".join(differences(begun["identity"], identity_json))
            raise ConfigError(
                f"{path} has an analysis with other settings ({differs}): use the same settings to continue it, or give"
                " another folder"
            )
        return cls(path, begun, differences(begun.get("environment"), dict(environment)))

    @contextmanager
    def locked(self, rank: int = 0, world_size: int = 1) -> Iterator[None]:
        """Lock the folder, or one rank's part. Raises `ConfigError` if it is locked."""
        with (
            self._lock("all", (fcntl.LOCK_EX if world_size == 1 else fcntl.LOCK_SH) | fcntl.LOCK_NB),
            self._lock(str(rank), fcntl.LOCK_EX | fcntl.LOCK_NB),
        ):
            yield

    @contextmanager
    def _lock(self, name: str, operation: int) -> Iterator[None]:
        try:
            stream = (self.directory / f".lock-{name}").open("w")
        except OSError as error:
            raise ConfigError(
                f"{self.directory} cannot be written ({error.strerror}): check its permissions, or give another folder"
            ) from error
        with stream:
            try:
                fcntl.flock(stream, operation)
            except BlockingIOError as error:
                raise ConfigError(
                    f"{self.directory} is being written by another process: wait for it, or give another folder"
                ) from error
            except OSError as error:
                raise ConfigError(
                    f"{self.directory} cannot be locked ({error.strerror}): give a folder on a file system with locks"
                ) from error
            yield

    def shard(self, index: int) -> dict[str, Any] | None:
        """Return the record of a whole shard, or None."""
        record = read_json(self._path(index, "json"))
        is_whole = record is not None and all(
            (file := self._path(index, f"{name}.parquet")).is_file() and file.stat().st_size == record["bytes"][name]
            for name in TABLES
        )
        return record if is_whole else None

    def is_last(self, index: int) -> bool:
        """True if no later shard was written."""
        return not any(int(path.stem) > index for path in (self.directory / SHARDS).glob("[0-9]*.json"))

    def shard_documents(self, index: int) -> list[dict[str, Any]]:
        """Return id, number of characters and any text of each document."""
        columns = ["doc_id", "n_chars", "text"]
        rows: list[dict[str, Any]] = read_table(self._path(index, "documents.parquet"), columns).to_pylist()
        return rows

    def reopen(self, index: int, digest: str) -> None:
        """Mark as incomplete if shard `index` is missing or its digest differs: the input has grown."""
        with self._lock("finish", fcntl.LOCK_EX), self._writing():
            record = self.shard(index)  # another process may have finished meanwhile
            if record is None or record["digest"] != digest:
                self._reopen()
                self._path(index, "json").unlink(missing_ok=True)

    def _reopen(self) -> None:
        if self.complete:
            entries = {name: value for name, value in self.manifest.items() if name not in ("totals", "shards")}
            self.manifest = entries | {"complete": False}
            write_json(self.directory / MANIFEST, self.manifest)

    def write_shard(self, index: int, tables: Mapping[str, pa.Table], about: Mapping[str, Any]) -> None:
        """Write a shard atomically. Raises `SinkFailed` if the disk fails."""
        if self._elsewhere:
            warnings.warn(
                f"{self.directory} was begun elsewhere ({'; '.join(self._elsewhere)}): the last bits of the remaining"
                " rows may differ",
                UserWarning,
                stacklevel=3,
            )
            self._elsewhere = ()
        self.reopen(index, about["digest"])
        with self._writing():
            (self.directory / SHARDS).mkdir(exist_ok=True)
            sizes = {name: write_table(self._path(index, f"{name}.parquet"), tables[name]) for name in TABLES}
            write_json(self._path(index, "json"), {**about, "index": index, "bytes": sizes})

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SinkFailed(
                f"{self.directory} cannot be written ({error.strerror or error}): whole shards are kept, run the"
                " same command again when there is space"
            ) from error

    def finish(self, digests: Sequence[str]) -> bool:
        """Merge all shards and mark the analysis complete; False if shards are missing.

        `digests` are of the shards that this process was given. Raises `ConfigError` if another process was given other
        documents.
        """
        with self._lock("finish", fcntl.LOCK_EX), self._writing():
            return self._finish(digests)

    def _finish(self, digests: Sequence[str]) -> bool:
        n_shards = len(digests)
        shards = [self.shard(index) for index in range(n_shards)]
        for shard, digest in zip(shards, digests, strict=True):
            if shard is not None and shard["digest"] != digest:
                last = shard["first"] + shard["n_documents"] - 1
                raise ConfigError(
                    f"documents {shard['first']} to {last} of {self.directory} are not those that this process was"
                    " given: give every process the same documents, in the same order (sets and listings of folders"
                    " have none), and another folder"
                )
        if any(shard is None for shard in shards):
            self._reopen()
            return False
        beyond = self.shard(n_shards)
        if beyond is not None:
            raise ConfigError(
                f"documents from {beyond['first']} on are gone since {self.directory} was begun: give another folder"
            )
        for name in ("documents", "summary"):
            self._merge(name, n_shards)
        write_table(self.directory / "concepts.parquet", self._all_concepts(n_shards))
        totals = _sum_counts([shard["totals"] for shard in shards])  # type: ignore[index]
        self.manifest = {**self.manifest, "complete": True, "totals": totals, "shards": shards}
        for folder in (self.directory, self.directory / SHARDS):
            for partial in folder.glob(".*.partial-*"):
                partial.unlink(missing_ok=True)
        write_json(self.directory / MANIFEST, self.manifest)
        return True

    def _path(self, index: int, suffix: str) -> Path:
        return self.directory / SHARDS / f"{index:05d}.{suffix}"

    def _merge(self, name: str, n_shards: int) -> None:
        with (
            replacing(self.directory / f"{name}.parquet") as stream,
            arrow().parquet.ParquetWriter(stream, schemas()[name], compression="zstd") as writer,
        ):
            for index in range(n_shards):
                writer.write_table(read_table(self._path(index, f"{name}.parquet")), row_group_size=ROWS_PER_GROUP)

    def _all_concepts(self, n_shards: int) -> pa.Table:
        """Add counts in order of shards, so that sums do not depend on interruptions."""
        pa = arrow()
        table, sums = None, dict[str, Any]()
        for index in range(n_shards):
            part = read_table(self._path(index, "concepts.parquet"))
            for name in ("n_documents", "n_tokens", "score_sum"):
                sums[name] = sums.get(name, 0) + part.column(name).to_numpy()
            by_part = np.asarray(part.column("n_by_part").to_pylist(), dtype=np.int64).reshape(-1, len(PARTS))
            sums["n_by_part"] = sums.get("n_by_part", 0) + by_part
            highest = part.column("max_score").to_numpy()
            sums["max_score"] = np.maximum(sums.get("max_score", highest), highest)
            table = part if table is None else table
        assert table is not None
        sums["n_by_part"] = list(sums["n_by_part"])
        for name, values in sums.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(at), pa.array(values, table.schema.field(at).type))
        return table


def _sum_counts(totals: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {}
    for part in totals:
        for name, value in part.items():
            if isinstance(value, Mapping):
                sums[name] = _sum_counts([sums.get(name, {}), value])
            else:
                sums[name] = value if name == "n_probes" else sums.get(name, 0) + value
    return sums


def differences(one: Any, other: Any, where: str = "", words: str = "{} was {!r}, now {!r}") -> list[str]:
    """List where two nested dicts differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        return [
            text
            for key in {**one, **other}
            for text in differences(one.get(key), other.get(key), f"{where}.{key}".lstrip("."), words)
        ]
    return [] if one == other else [words.format(where, one, other)]
