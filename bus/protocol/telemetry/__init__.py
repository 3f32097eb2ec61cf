"""The recent work of a fleet's workers, computed from their presence and command acks."""
