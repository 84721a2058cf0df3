"""What a router costs for each token and request, ours and others', in front of equal workers."""
