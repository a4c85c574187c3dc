"""The workbench: tools for saved responses, as commands of `routed-experts`.

No other package imports this one; `server/cli/main.py` loads a tool when its command runs. A
command that cannot run raises `CommandError`; a response that is not one raises `RoutingError`.
"""
