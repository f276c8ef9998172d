"""Analyses made by hand, for what no tokenizer at hand would do: `write_analysis(folder, documents, concepts)`."""

import numpy as np
import pyarrow as pa

from probemon.host.chat_forms import PARTS
from probemon.lab.corpora.analysis_files import COUNTED, schemas
from probemon.lab.corpora.analysis_folder import Analysis

IDENTITY = {
    "pack": {"name": "by hand"},
    "host": {"model": "none", "dtype": "float32", "device": "cpu"},
    "floor": "fired",
}


def write_analysis(folder, documents, concepts, *, identity=None, finish=True, shard=256, levels=()):
    """`documents`: (id, text, tokens, reason), a token being (start, end, {concept number: score}); `concepts`: (id,
    name, parents, threshold), parents before children. `levels`: of the concepts, where they do not follow from these.
    """
    analysis = Analysis.begin(folder, {**IDENTITY, **(identity or {})}, {"probemon": "0"}, resume=False)
    number = {concept[0]: i for i, concept in enumerate(concepts)}
    levels, paths, stated = [], [], list(levels)
    for i, (_, name, parents, _) in enumerate(concepts):
        levels.append(stated[i] if stated else max((levels[number[parent]] + 1 for parent in parents), default=0))
        paths.append([*(paths[min(number[parent] for parent in parents)] if parents else []), name])
    for index, first in enumerate(range(0, len(documents), shard)):
        rows, told, pairs = [], [], {}
        part = documents[first : first + shard]
        for d, (name, text, tokens, reason) in enumerate(part, first):
            n_rows = 0
            for position, (start, end, scores) in enumerate(tokens):
                word = text[start:end] if text is not None and start >= 0 else ""
                for c, score in sorted(scores.items()):
                    score = float(np.float32(score))
                    own = (d, name, position, start, end, position, word, concepts[c][0], levels[c], score)
                    rows.append((*own, None, None))
                    pairs.setdefault((d, c), []).append((score, -position))
                    n_rows += 1
            active = len(concepts) * len(tokens) // 2
            told.append(
                (
                    d,
                    name,
                    reason,
                    len(text or ""),
                    len(tokens),
                    0,
                    n_rows,
                    active,
                    0,
                    len(concepts) * len(tokens) - active,
                    active,
                    0,
                    0,
                    0,
                    0,
                    text,
                )
            )
        summary = [
            (
                d,
                documents[d][0],
                concepts[c][0],
                levels[c],
                len(found),
                max(found)[0],
                -max(found)[1],
                sum(s for s, _ in found) / len(documents[d][2]),
            )
            for (d, c), found in sorted(pairs.items())
        ]
        mine = [[] for _ in concepts]
        for (_, c), found in pairs.items():
            mine[c].append(found)
        whole = [
            (
                cid,
                name,
                levels[c],
                parents,
                paths[c],
                True,
                threshold,
                None,
                len(mine[c]),
                sum(map(len, mine[c])),
                max((max(found)[0] for found in mine[c]), default=0.0),
                sum(score for found in mine[c] for score, _ in found),
                [0] * len(PARTS),
            )
            for c, (cid, name, parents, threshold) in enumerate(concepts)
        ]
        tables = {}
        for (table, schema), values in zip(schemas().items(), (rows, told, summary, whole), strict=True):
            columns = zip(*values, strict=True) if values else [[] for _ in schema]
            tables[table] = pa.table(
                [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)],
                schema=schema,
            )
        totals = {
            "documents": len(part),
            "bad_documents": sum(bool(d[3]) for d in part),
            "tokens": sum(t[4] for t in told),
            "unseen": 0,
            "rows": len(rows),
            **{name: sum(t[7 + i] for t in told) for i, name in enumerate(COUNTED)},
        }
        analysis.write_shard(index, tables, {"digest": "", "first": first, "n_documents": len(part), "totals": totals})
    if finish:
        assert analysis.finish([""] * -(-len(documents) // shard))
    return analysis
