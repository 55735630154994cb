-- Ends a lease and leaves an epoch that nobody owns, so that what the releaser still has on its way is fenced.
local P, holder, epoch = ARGV[1], ARGV[2], ARGV[3]
local has = redis.call('HMGET', P .. 'leader', 'e', 'h')
if has[1] ~= epoch or has[2] ~= holder then return { 0, has[1] or '0' } end
redis.call('HSET', P .. 'leader', 'e', string.format('%.0f', tonumber(epoch) + 1), 'h', '')
redis.call('DEL', P .. 'lease')
return { 1, epoch }
