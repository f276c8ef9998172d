"""The command watch: its options (`command`), what stops it (`rules`), its view, and what it says at the end."""
