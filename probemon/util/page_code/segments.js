// A text cut into what its tokens stand for.

/** The text cut wherever a token begins or ends: [text, tokens], each character once, however many tokens share it. */
export function segments(text, tokens) {
  const cuts = [...new Set([0, text.length, ...tokens.flatMap((token) => [token.start, token.end])])]
    .filter((at) => at >= 0 && at <= text.length)
    .sort((a, b) => a - b);
  const at = new Map(cuts.map((cut, i) => [cut, i]));
  const found = cuts.slice(0, -1).map((cut, i) => [text.slice(cut, cuts[i + 1]), []]);
  for (const token of tokens) {
    const first = Math.min(at.get(token.start) ?? 0, found.length - 1);
    for (let i = first; i < Math.max(first + 1, at.get(token.end) ?? 0) && i < found.length; i++)
      found[i][1].push(token);
  }
  return found;
}
