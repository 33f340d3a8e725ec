"""The orchestrator deployment, which runs requests over the pools' Ray handles."""
