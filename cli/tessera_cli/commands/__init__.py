"""One module per subcommand of `tessera`, each named after the command that it holds."""
