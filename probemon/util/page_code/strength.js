// How strong a score is, and in which of seven steps: the breaks are the same on every page, so that two can be
// compared.

const MOST = 100; // a score of 1 is infinitely far over its threshold, and a page shows numbers

export const logit = (x) => Math.log(x) - Math.log1p(-x);

/**
 * By how much a score exceeds its threshold, in logits, between -100 and 100; without a threshold (null), the score.
 * What lists are ordered by.
 */
export function strengthOver(threshold, x) {
  if (threshold === null) return x;
  return x === threshold ? 0 : Math.max(-MOST, Math.min(MOST, logit(x) - logit(threshold)));
}

export const BREAKS = { strength: [0.5, 1, 1.5, 2, 3, 4], score: [0.15, 0.3, 0.45, 0.6, 0.75, 0.9] };

/** The step of a value, from 1 (up to the first break) to 7 (over the last). */
export const step = (breaks, value) => 1 + breaks.filter((least) => value > least).length;
