"""`python -m routed_experts.server.openapi`: writes or checks `openapi.yaml` and `docs/http.md`."""

import sys

from routed_experts.server.openapi.spec import main

sys.exit(main())
