"""Copies, pairs and near-duplicates stay in one group and on one side of a split."""

import unicodedata

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from probemon.lab.training.groups import NEAR, group_texts, split_groups
from probemon.lab.training.words import places_of, words_in

SHARES = {"train": 0.5, "calibrate": 0.2, "test": 0.3}
words = st.lists(st.sampled_from([f"w{i}" for i in range(40)]), min_size=1, max_size=60)


def jaccard(a, b):
    a, b = ({" ".join(text[i : i + 3]) for i in range(max(1, len(text) - 2))} for text in (a, b))
    return len(a & b) / len(a | b)


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=2, max_size=25), st.randoms(use_true_random=False), st.integers(0, 9))
def test_copies_pairs_and_near_duplicates_stay_in_one_group(texts, rng, seed):
    """Beside all pairs compared, one by one."""
    planted = [list(text) for text in texts]
    for text in texts:
        changed = list(text)
        for _ in range(rng.choice([0, 0, 1, 2])):
            changed[rng.randrange(len(changed))] = "other"
        said = [word.upper() if rng.random() < 0.5 else word + "," for word in changed]
        planted += [said] if rng.random() < 0.7 else []
    groups = [None] * len(planted)
    for i in range(0, len(planted) - 1, 5):  # and some pairs, by name
        groups[i] = groups[i + 1] = f"pair {i}"
    plain = [[word.lower().strip(",") for word in text] for text in planted]
    expected = list(range(len(planted)))
    for j in range(len(planted)):
        for i in range(j):
            named = groups[i] is not None and groups[i] == groups[j]
            if named or jaccard(plain[i], plain[j]) >= NEAR:
                expected = [expected[i] if group == expected[j] else group for group in expected]
    numbers = {}
    group = group_texts([" ".join(text) for text in planted], groups)
    assert group.tolist() == [numbers.setdefault(number, len(numbers)) for number in expected]
    labels = np.asarray([[rng.choice([0, 1, -1])] for _ in planted], dtype=np.int8)
    parts = split_groups(group, labels, SHARES, seed=seed)
    assert (np.stack(list(parts.values())).sum(axis=0) == 1).all()
    for mask in parts.values():
        assert not set(group[mask]) & set(group[~mask])


def test_texts_that_only_share_words_are_separate_groups():
    texts = [" ".join(f"w{(7 * i + k * k) % 50}" for k in range(40)) for i in range(30)]
    assert len(set(group_texts(texts, [None] * 30).tolist())) == 30


def test_words_are_found_in_scripts_without_spaces():
    one = "小狗在花园里跑来跑去，然后它喝了一些水，又回到了它的房子里睡觉"
    near, other = one.replace("花园", "院子"), "轮船明天早上从港口出发，将于星期五晚上到达对面的岛屿"
    assert group_texts([one, other, near], [None] * 3).tolist() == [0, 1, 0]
    assert words_in("小狗 runs, ไป!") == ["小", "狗", "runs", "ไ", "ป", "!"]


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]))
def test_copy_in_another_encoding_is_the_same_group(rng, form):
    words = [
        "café",
        "naïve",
        "Ærø",
        "übel",
        "fjord",
        "whale",
        "señor",
        "Ångström",
        "oﬃce",
        "straße",
        "ガラス",
        "น้ำ",
        "♥x",
    ]
    text = " ".join(rng.choice(words) for _ in range(12))
    copy = unicodedata.normalize(form, text)
    invisible = "\u00ad\u200b\u200d\u2060\ufeff\ufe0f"
    copy = "".join(c + rng.choice(invisible) if c.isalpha() and rng.random() < 0.3 else c for c in copy)
    copy = "".join(chr(ord(c) + 0xFEE0) if "a" <= c <= "z" and rng.random() < 0.2 else c for c in copy)
    assert words_in(copy) == words_in(text)
    assert group_texts([text, "another text of no likeness", copy], [None] * 3).tolist() == [0, 1, 0]
    # Give-away words are found in the copy, too.
    places = [copy[a:b] for a, b in places_of({"whale", "café"}, copy)]
    assert len(places) == sum(word in ("whale", "café") for word in text.split())


def test_labels_are_spread_by_their_shares_including_rare_ones():
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(400), rng.integers(1, 4, 400))
    labels = (rng.random((400, 3)) < [0.5, 0.1, 0.03]).astype(np.int8)[group]
    parts = split_groups(group, labels, SHARES, seed=0)
    for p in range(3):
        positive = labels[:, p] == 1
        for name, share in SHARES.items():
            assert abs(parts[name][positive].mean() - share) < 2.5 / positive.sum() + 0.01, (p, name)


def test_split_depends_on_the_seed():
    group, labels = np.arange(50), (np.arange(50)[:, None] % 2).astype(np.int8)
    same, again, other = (split_groups(group, labels, SHARES, seed=seed) for seed in (1, 1, 2))
    assert all((same[name] == again[name]).all() for name in SHARES)
    assert any((same[name] != other[name]).any() for name in SHARES)
