"""Inputs broken on purpose, the rooms that read them, and what may come of it: a typed error or a correct pack.

    python scripts/benchmarks/fuzz.py --cases 100000 --out docs/benchmarks/fuzz.json

`mutate` breaks a folder, `targets` are the rooms with valid folders to begin from, `independent` evaluates the same
files by other means, `guard` watches what is opened and run, `case` is one input from writing to verdict.
tests/fuzzing/test_fuzz.py uses the same.

    python scripts/benchmarks/fuzz_commands.py --out docs/benchmarks/fuzz_commands.json

`command_lines` draws command lines from the command line's own table, `workshop` makes the files that they name, and
`command_runs` runs and judges them; tests/fuzzing/test_hostile_commands.py has a sample.
"""
