"""What compiler and runtime share: plans, operators, and where state lives. Imports no other room."""
