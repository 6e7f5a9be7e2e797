"""`blinkctl doctor`: whether a machine can serve, check by check, with what was seen and what to do."""
