"""All parts of nats-py that rollbus uses, imported without aiohttp.

nats-py imports aiohttp if it is installed, for websockets, which rollbus does not use (`server.py` accepts `nats://`
and `tls://`). vLLM needs aiohttp, so it is installed beside each worker, and its import takes longer than nats-py's.
"""

# ruff: noqa: PLC0414 - the names are for other modules

import sys

# None makes an import fail as if the package were not installed (Python's documentation of `sys.modules`).
_is_missing = "aiohttp" not in sys.modules and "nats.aio.transport" not in sys.modules
if _is_missing:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
try:
    from nats import errors as errors
    from nats.aio.client import Client as Client
    from nats.aio.client import Srv as Srv
    from nats.aio.msg import Msg as Msg
    from nats.aio.subscription import Subscription as Subscription
    from nats.aio.transport import Transport as Transport
    from nats.errors import Error as Error
    from nats.errors import SlowConsumerError as SlowConsumerError
    from nats.nuid import NUID as NUID
    from nats.protocol.parser import ERR_RE as ERR_RE
    from nats.protocol.parser import PERMISSIONS_ERR as PERMISSIONS_ERR
finally:
    if _is_missing:
        del sys.modules["aiohttp"]
