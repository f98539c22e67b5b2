"""Every private name of torch that Paceline relies on, each with a contract test."""
