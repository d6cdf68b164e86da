"""FedTasuki: its class statistics and means."""
