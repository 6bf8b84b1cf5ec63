"""Lets ``python -m tessera_cli`` stand in for the installed command."""

from tessera_cli.main import main

main()
