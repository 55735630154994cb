-- Opens a session of a node.
local P, coordinator, node, above = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local leader = redis.call('HGET', P .. 'leader', 'e') or '0'
if leader ~= coordinator or leader == '0' then return { 0, leader } end
local has = tonumber(redis.call('HGET', P .. 'sessions', node) or '0')
local epoch = string.format('%.0f', math.max(has, above) + 1)
redis.call('HSET', P .. 'sessions', node, epoch)
return { 1, epoch }
