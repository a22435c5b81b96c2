"""deco_ray: DeCo-MIL for long-tailed whole-slide images, trained, tuned and compared on Ray."""

import os

__version__ = "0.1.0"

# Ray gives its first server 30 s to start, which a cold disk can exceed; read by `ray.init` and `ray start` alike.
os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")
