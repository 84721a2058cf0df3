"""`pdserve bench chaos`: break a running service and check every answer."""
