"""The tables of the pages, from result files: functions from what a file holds to lines of Markdown."""
