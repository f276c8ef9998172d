// How strong a score is, and in which of seven steps: the breaks are the same on every page, so that two can be
// compared.

export const logit = (x) => {
  const s = Math.min(Math.max(x, 1e-6), 1 - 1e-6);
  return Math.log(s / (1 - s));
};

/**
 * By how much a score exceeds its threshold, in logits; without a threshold (null), the score. What lists are ordered
 * by.
 */
export const strengthOver = (threshold, x) => (threshold === null ? x : logit(x) - logit(threshold));

export const BREAKS = { strength: [0.5, 1, 1.5, 2, 3, 4], score: [0.15, 0.3, 0.45, 0.6, 0.75, 0.9] };

/** The step of a value, from 1 (up to the first break) to 7 (over the last). */
export const step = (breaks, value) => 1 + breaks.filter((least) => value > least).length;
