"""What would happen if: predictions made from the tables of a trace."""
