// Who stands above whom. Concepts are numbers; `parents[c]` lists those right above c, the first one first.

/** Return a function `path(c)`: from the root to c by first parents. */
export function pathsOf(parents) {
  const paths = [];
  const path = (c) => (paths[c] ??= parents[c].length ? [...path(parents[c][0]), c] : [c]);
  return path;
}
