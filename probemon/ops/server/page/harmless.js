// Texts of others, made harmless where they are shown: the same characters as in probemon/util/harmless_text.py, which
// a test compares.

const HARMFUL = new RegExp(
  "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
    "\\ufeff\\ufff0-\\ufffb\\ud800-\\udfff\\u{e0000}-\\u{e0fff}]",
  "gu",
);
const SHORT = { "\t": "\\t", "\n": "\\n", "\r": "\\r" };

function written(character) {
  const code = character.codePointAt(0);
  const hex = code.toString(16);
  return (
    SHORT[character] ??
    (code < 0x100
      ? `\\x${hex.padStart(2, "0")}`
      : code < 0x10000
        ? `\\u${hex.padStart(4, "0")}`
        : `\\U${hex.padStart(8, "0")}`)
  );
}

/**
 * The text with every character written out that would turn the words around it or that nobody would see, but for
 * `keep`.
 */
export const harmless = (text, keep = "") =>
  text.replace(HARMFUL, (character) => (keep.includes(character) ? character : written(character)));

/** The same on one line; of a longer text the first `n` characters. */
export const clip = (text, n) => (text.length <= n ? harmless(text) : `${harmless(text.slice(0, n))}…`);
