"""The operator's commands: `blink up` starts both programs on one machine, `blinkctl` administers a runtime."""
