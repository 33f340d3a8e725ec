"""What the models read: prompts of chats, with documents or what was retrieved of them."""
