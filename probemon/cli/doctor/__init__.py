"""The command doctor: its options (`command`), the checks (`examination`), and what settings cost a text."""
