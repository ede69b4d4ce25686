"""``python -m spformat``: the command, where its script is not on the path."""

try:
    from spformat_cli.entry import main
except ModuleNotFoundError as e:  # in a checkout that is not installed, where the command lies beside the package
    if e.name != "spformat_cli":
        raise
    from cli.entry import main

main()
