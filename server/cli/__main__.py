"""`python -m routed_experts.server.cli`, where the command `routed-experts` is not on the path."""

from routed_experts.server.cli.main import main

raise SystemExit(main())
