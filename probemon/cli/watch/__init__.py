"""The command watch: options (`command`), stop rules (`rules`), live view, and final report (`answer`)."""
