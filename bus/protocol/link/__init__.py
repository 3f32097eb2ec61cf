"""The numbered frames from one worker to one client: acknowledgements, credit and resends."""
