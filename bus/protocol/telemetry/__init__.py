"""What a fleet's workers have done lately, computed from what they announce and answer."""
