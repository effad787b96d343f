"""What only a device can say: answers, memory, copies that overlap, and what it does under load."""
