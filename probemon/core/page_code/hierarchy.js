// Who stands above whom. Concepts are numbers; `parents[c]` lists those right above c, the first one first.

/**
 * Two functions: `path(c)`, from the root to c by first parents; `ancestors(c)`, all above c by every parent, a Set.
 */
export function hierarchyOf(parents) {
  const paths = [];
  const path = (c) => (paths[c] ??= parents[c].length ? [...path(parents[c][0]), c] : [c]);
  function ancestors(c, known = new Set()) {
    for (const parent of parents[c]) {
      if (!known.has(parent)) ancestors(parent, known.add(parent));
    }
    return known;
  }
  return { path, ancestors };
}
