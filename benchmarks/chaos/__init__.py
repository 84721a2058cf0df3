"""`pdserve bench chaos`: inject faults into a running service and check every answer."""
