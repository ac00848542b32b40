"""Hides torch from the programs that tests start: most users do not have it.

Transformers would import it, which takes as long as everything else that `gtpo` imports.
"""

import sys

sys.modules["torch"] = None
