"""`pdserve bench soak`: detection of leaks under long traffic and worker churn."""
