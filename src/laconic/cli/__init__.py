"""The command line: one thin file per subcommand, each with `run(args) -> exit code`."""
